"""Bugs in Shardlab itself for students to hunt, others for each student: how they are drawn, tried and described."""
