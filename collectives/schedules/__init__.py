"""Message schedules, and the postcondition of each collective."""
