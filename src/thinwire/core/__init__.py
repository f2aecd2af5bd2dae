"""The round and all that belongs to it: what every algorithm is built on."""
