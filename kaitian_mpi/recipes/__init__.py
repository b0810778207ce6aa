"""What kaitian-train trains: a task made from its flags."""
