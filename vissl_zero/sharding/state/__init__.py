"""A rank's shards, their saved form, and the sharded teacher."""
