"""Ways to carry bytes between ranks. Each is imported when it is first used."""
