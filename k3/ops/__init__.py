"""The arithmetic of the network: each operation with its equation in `<op>_ref.py` and its
dispatcher in `<op>.py`.
"""
