"""Every worker a Ray actor, in real time; every pace, worker death and restart."""
