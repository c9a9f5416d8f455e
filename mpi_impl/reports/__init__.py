"""What a run tells: before its first step, while it works, and at its end beside what the formulas say."""
