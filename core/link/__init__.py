"""The engine link: typed messages between the runtime in SGLang's scheduler and the control plane."""
