"""What state a pod has: components, layouts, negotiation and spans, in pure Python."""
