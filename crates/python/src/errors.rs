//! FlashCore's errors as Python exceptions, with the same texts.

use flashcore::{Error, Name};
use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    sync::PyOnceLock,
    types::{PyString, PyType},
};

/// The exception classes, which Python defines because each has two bases.
struct Classes {
    contract: Py<PyType>,
    unsupported: Py<PyType>,
    device: Py<PyType>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

fn classes(py: Python<'_>) -> PyResult<&Classes> {
    CLASSES.get_or_try_init(py, || {
        let module = py.import("flashcore_attn._errors")?;
        let class = |name: &str| Ok::<_, PyErr>(module.getattr(name)?.cast_into::<PyType>()?.unbind());
        Ok(Classes {
            contract: class("ContractError")?,
            unsupported: class("UnsupportedError")?,
            device: class("DeviceError")?,
        })
    })
}

/// The exception of an error.
pub fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let kind = |classes: &Classes| match error {
        Error::Unsupported { .. } => classes.unsupported.clone_ref(py),
        Error::Device { .. } | Error::OutOfMemory { .. } => classes.device.clone_ref(py),
        _ => classes.contract.clone_ref(py),
    };
    exception(py, kind, &error.to_string())
}

/// A violation of the contract that is only possible from Python.
pub fn contract(py: Python<'_>, text: &str) -> PyErr {
    exception(py, |classes| classes.contract.clone_ref(py), text)
}

/// Something that is not supported.
pub fn unsupported(py: Python<'_>, text: &str) -> PyErr {
    exception(py, |classes| classes.unsupported.clone_ref(py), text)
}

fn exception(py: Python<'_>, class: impl FnOnce(&Classes) -> Py<PyType>, text: &str) -> PyErr {
    match classes(py) {
        Ok(classes) => PyErr::from_type(class(classes).into_bound(py), (PyString::new(py, text).unbind(),)),
        Err(_) => PyRuntimeError::new_err(text.to_owned()),
    }
}

/// The error of a view with the tensor's name, which the view itself does not know.
pub fn named(error: Error, name: Name) -> Error {
    let mut error = error;
    match &mut error {
        Error::Rank { tensor, .. }
        | Error::InnerStride { tensor, .. }
        | Error::OutOfBounds { tensor, .. }
        | Error::OverlappingOutput { tensor, .. }
        | Error::Alignment { tensor, .. }
        | Error::NullPointer { tensor }
        | Error::TooLarge { tensor, .. } => *tensor = name,
        _ => {}
    }
    error
}
