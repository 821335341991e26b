"""titan-coordinator: attention, router and KV cache here; experts here, on workers, or from the local SSD."""
