"""Layout shard inside other people's trainers: `kaitian-run --layout shard`."""
