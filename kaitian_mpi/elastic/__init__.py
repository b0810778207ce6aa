"""Which ranks are active and which are on standby, and how they regroup after a loss."""
