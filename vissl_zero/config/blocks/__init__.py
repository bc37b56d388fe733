"""The typed tree under ``config:``, one file a block. A block's fields carry VISSL's names where VISSL has them."""
