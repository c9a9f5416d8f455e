"""The course: labs, their grading on limited ranks, bugs for students to hunt, and the tests of all this."""
