"""The interactive report: one HTML page that needs no network, or the same page served live from a results folder."""
