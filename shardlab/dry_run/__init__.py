"""The program as a rank of an imagined world: on arrays without data, among groups that answer immediately."""
