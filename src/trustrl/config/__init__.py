"""What a user may choose: frozen settings objects that check themselves and need no torch."""
