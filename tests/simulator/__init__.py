"""A simulator of training faults: sftron over a simulated disk, clock, ranks and workers, from one seed."""
