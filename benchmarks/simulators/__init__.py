"""Two simulators of an all-reduce that check the planner's closed form: our own, event by event, and SimGrid."""
