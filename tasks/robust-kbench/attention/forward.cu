// FlashCore as an extension of torch: `forward` hands the tensors to the Python package flashcore-attn, which emits
// its own PTX and launches it on torch's stream. There is no device code here, so nvcc has nothing to optimise.

#include <torch/extension.h>

torch::Tensor forward(torch::Tensor q, torch::Tensor k, torch::Tensor v, bool causal, double softcap, double scale) {
    // Looked up once. Never freed: at the end of the process the interpreter is gone before statics are.
    static const auto* attention =
        new py::object(py::module_::import("flashcore_attn").attr("attention"));
    return (*attention)(q, k, v, py::arg("causal") = causal, py::arg("softcap") = softcap, py::arg("scale") = scale)
        .cast<torch::Tensor>();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("forward", &forward, "Attention by FlashCore", py::arg("q"), py::arg("k"), py::arg("v"), py::arg("causal"),
          py::arg("softcap"), py::arg("scale"));
}
