"""What mpirun is given, and how it reaches hosts: command lines, hostfiles, ssh."""
