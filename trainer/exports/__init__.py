"""What an exported folder says about itself: lathe.json for programs, README.md for people."""
