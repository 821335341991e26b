"""Measuring what the cost model needs: c_n, lambda, tau_attn, the synchronisation, rho_0n. With the real shapes."""
