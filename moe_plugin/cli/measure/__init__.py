"""What `recommend`, `calibrate` and `profile-device` measure on the ranks that run them."""
