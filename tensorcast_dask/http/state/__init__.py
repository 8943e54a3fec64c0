"""What of the gateway decides: who may ask, what is asked, how it is answered. Pure."""
