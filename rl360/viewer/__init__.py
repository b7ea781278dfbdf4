"""`rl360 view`: a finished or running experiment as web pages on this machine. Reads the run folder, writes nothing."""
