"""How ranks start and how they end: the launcher, hosts, a pool of ranks, and the last words of a program."""
