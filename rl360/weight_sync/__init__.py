"""How new weights reach engines that have a copy of their own: buckets, transports, the order of a synchronisation."""
