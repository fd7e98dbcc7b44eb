"""Weight transfer between trainer ranks: `transfer_plan` computes the messages, `exchange` sends them."""
