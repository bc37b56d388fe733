"""Networks that give features: ViT, ResNet, RegNet, AlexNet, and those of timm and torchvision."""
