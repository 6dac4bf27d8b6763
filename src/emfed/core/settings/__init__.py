"""What a fit can be asked, declared once for all faces; imports nothing that takes time."""
