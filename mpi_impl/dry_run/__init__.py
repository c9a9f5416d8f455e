"""The program as a rank of a world that is not there: on arrays without data, among groups that answer immediately."""
