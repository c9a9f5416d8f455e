"""The start and the end of ranks: the launcher, hosts, a pool of ranks, and the last words of a program."""
