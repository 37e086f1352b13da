//! The thin path for torch: an eager call goes from Python to the engine without torch's dispatcher.
//!
//! It takes plain calls only. Anything that needs the dispatcher (gradients, tracing, functorch, autocast, modes,
//! tensor subclasses), or work on its shapes, is declined with `NotImplemented`, and goes through the registered
//! operator instead.

use flashcore::Name;
use pyo3::{
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyNotImplemented, PyTuple, PyType},
};

use crate::{
    arrays::{self, Array, Order},
    call,
    lengths::Lengths,
    options::{self, Options},
};

/// What the thin path needs from torch, looked up once.
struct Torch {
    /// Classes whose instances are plain memory.
    plain: Vec<Py<PyType>>,
    is_grad_enabled: Py<PyAny>,
    /// Functions that return true if something has to see every operator.
    watchers: Vec<Py<PyAny>>,
    empty_like: Py<PyAny>,
    empty_output: Py<PyAny>,
    empty_lse: Py<PyAny>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Gives the thin path what it needs from torch. Returns whether tensors can be read without going through Python.
#[pyfunction]
pub fn bind_torch(
    py: Python<'_>,
    plain: Vec<Bound<'_, PyType>>,
    is_grad_enabled: Py<PyAny>,
    watchers: Vec<Py<PyAny>>,
    empty_like: Py<PyAny>,
    empty_output: Py<PyAny>,
    empty_lse: Py<PyAny>,
) -> PyResult<bool> {
    let direct = plain.iter().map(arrays::is_direct).collect::<PyResult<Vec<_>>>()?.into_iter().all(|x| x);
    let plain = plain.into_iter().map(Bound::unbind).collect();
    let torch = Torch { plain, is_grad_enabled, watchers, empty_like, empty_output, empty_lse };
    let _ = TORCH.set(py, torch);
    Ok(direct)
}

impl Torch {
    /// Whether only the values matter for a call on these tensors.
    fn is_plain(&self, tensors: [&Bound<'_, PyAny>; 3]) -> PyResult<bool> {
        let py = tensors[0].py();
        for tensor in tensors {
            let class = tensor.get_type_ptr().cast::<pyo3::ffi::PyObject>();
            if !self.plain.iter().any(|plain| plain.as_ptr() == class) {
                return Ok(false);
            }
        }
        if self.is_grad_enabled.bind(py).call0()?.is_truthy()? {
            for tensor in tensors {
                if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                    return Ok(false);
                }
            }
        }
        for watcher in &self.watchers {
            if watcher.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Attention on torch tensors: the output, or (output, lse), or `NotImplemented` if the call is not a plain one.
/// `grouped` allows fewer heads in k than in q.
#[pyfunction]
#[pyo3(signature = (q, k, v, mask, left, right, key_lengths, scale, softcap, layout, with_lse, grouped))]
pub fn torch_attention<'py>(
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    mask: &str,
    left: Option<usize>,
    right: Option<usize>,
    key_lengths: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = options::scale)] scale: Option<f64>,
    #[pyo3(from_py_with = options::softcap)] softcap: f64,
    layout: &str,
    with_lse: bool,
    grouped: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = q.py();
    let decline = || Ok(PyNotImplemented::get(py).to_owned().into_any());
    let options = Options::new(py, mask, left, right, scale, softcap, layout)?;
    let Some(torch) = TORCH.get(py) else { return decline() };
    if !torch.is_plain([q, k, v])? {
        return decline();
    }
    let [Ok(q_in), Ok(k_in), Ok(v_in)] =
        [(q, Name::Q), (k, Name::K), (v, Name::V)].map(|(tensor, name)| Array::read(tensor, name))
    else {
        // Tensors without readable memory, such as torch's "meta" ones.
        return decline();
    };
    let inputs = [q_in, k_in, v_in];
    if !inputs.iter().all(|input| input.has_rows() && input.is_ready()) {
        return decline();
    }
    let [q_sizes, k_sizes, v_sizes] = inputs.each_ref().map(Array::sizes);
    let heads = if options.order == Order::HeadsFirst { 1 } else { 2 };
    let same = |dim: usize, [a, b]: [&[i64]; 2]| a[dim] == b[dim];
    if !same(0, [q_sizes, k_sizes])
        || !same(0, [q_sizes, v_sizes])
        || !same(heads, [k_sizes, v_sizes])
        || (!grouped && !same(heads, [q_sizes, k_sizes]))
    {
        return decline();
    }
    let lengths = key_lengths.map(Lengths::read).transpose()?;
    let o = if q_sizes[3] == v_sizes[3] {
        torch.empty_like.bind(py).call1((q,))?
    } else {
        torch.empty_output.bind(py).call1((q, v))?
    };
    let lse = with_lse.then(|| torch.empty_lse.bind(py).call1((q, layout))).transpose()?;
    let out = Array::read(&o, Name::O)?;
    if !out.has_rows() {
        // Where elements of q share memory, torch may put another dimension inside.
        return decline();
    }
    let lse_out = lse.as_ref().map(|lse| Array::read(lse, Name::Lse)).transpose()?;
    call::execute(
        py,
        inputs.each_ref(),
        &out,
        lse_out.as_ref(),
        lengths.as_ref(),
        [None; 3],
        None,
        false,
        options,
    )?;
    drop(out);
    match lse {
        None => Ok(o),
        Some(lse) => {
            drop(lse_out);
            Ok(PyTuple::new(py, [o, lse])?.into_any())
        }
    }
}
