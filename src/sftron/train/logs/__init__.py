"""What a run writes about itself: the console, its log files, and the copies for loggers."""
