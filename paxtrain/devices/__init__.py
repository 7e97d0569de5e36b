"""Device kinds: what data sheets and drivers say of them. A new GPU is added here.

Imports nothing of the project.
"""
