"""What a communicator reports of its calls, and how it measures the machine."""
