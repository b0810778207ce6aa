"""Starting a job again after a failure, without the hosts that are lost."""
