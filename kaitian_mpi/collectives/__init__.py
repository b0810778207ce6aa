"""How a collective is carried out: by a vendor's library, by host memory, or by both."""
