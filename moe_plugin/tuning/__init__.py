"""What is chosen while training runs: layouts, exchanges, expert compute."""
