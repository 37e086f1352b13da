//! The options of a call as Python gives them.

use flashcore::{Attention, Mask, Quantiser};
use pyo3::{
    exceptions::{PyOverflowError, PyTypeError},
    prelude::*,
    types::PyBool,
};

use crate::{arrays::Order, errors};

/// Everything that a call is given besides the tensors.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    mask: Mask,
    scale: Option<f32>,
    softcap: f32,
    quantise: Option<Quantiser>,
    /// The keys that share a descale of k and one of v, where not all of a head do.
    pub descale_keys: Option<usize>,
    /// How the shapes of q, k, v and o are ordered.
    pub order: Order,
}

impl Options {
    /// Reads a mask's name with the sides of its window, the scale, the softcap and the layout's name.
    pub fn new(
        py: Python<'_>,
        mask: &str,
        left: Option<usize>,
        right: Option<usize>,
        scale: Option<f64>,
        softcap: f64,
        layout: &str,
    ) -> PyResult<Self> {
        let mask = match mask {
            "none" => Mask::None,
            "causal" => Mask::Causal,
            "causal-top-left" => Mask::CausalTopLeft,
            "window" => Mask::Window { left, right },
            _ => {
                let text = format!(
                    "mask is '{mask}', possible are 'none', 'causal', 'causal-top-left' and 'window'"
                );
                return Err(errors::contract(py, &text));
            }
        };
        let order = Order::from_name(py, layout)?;
        let scale = scale.map(|scale| scale as f32);
        Ok(Self { mask, scale, softcap: softcap as f32, quantise: None, descale_keys: None, order })
    }

    /// With tensors that become 8-bit floats first, in the way that a text names.
    pub fn quantised(self, py: Python<'_>, text: Option<&str>) -> PyResult<Self> {
        let read = text.map(str::parse).transpose();
        Ok(Self { quantise: read.map_err(|error| errors::raise(py, &error))?, ..self })
    }

    /// With a descale of k and one of v for each so many keys.
    pub fn with_descale_keys(self, descale_keys: Option<usize>) -> Self {
        Self { descale_keys, ..self }
    }

    /// The call that they ask for.
    pub fn attention(self) -> Attention<'static> {
        let mut attention = Attention::new().mask(self.mask).softcap(self.softcap);
        if let Some(quantiser) = self.quantise {
            attention = attention.fp8(quantiser);
        }
        match self.scale {
            Some(scale) => attention.scale(scale),
            None => attention,
        }
    }
}

/// A mask's name and the sides of its window.
pub fn of_mask(mask: Mask) -> (&'static str, Option<usize>, Option<usize>) {
    match mask {
        Mask::None => ("none", None, None),
        Mask::Causal => ("causal", None, None),
        Mask::CausalTopLeft => ("causal-top-left", None, None),
        Mask::Window { left, right } => ("window", left, right),
    }
}

/// Reads the argument `scale`.
pub fn scale(given: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    if given.is_none() { Ok(None) } else { number("scale", given).map(Some) }
}

/// Reads the argument `softcap`.
pub fn softcap(given: &Bound<'_, PyAny>) -> PyResult<f64> {
    number("softcap", given)
}

/// A number. A bool is refused: it is an argument in the wrong place.
fn number(name: &str, given: &Bound<'_, PyAny>) -> PyResult<f64> {
    let py = given.py();
    let value = if given.is_instance_of::<PyBool>() { None } else { Some(given.extract::<f64>()) };
    match value {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) if error.is_instance_of::<PyOverflowError>(py) => Err(errors::contract(
            py,
            &format!("{name} is beyond the largest number, possible is a finite one"),
        )),
        _ => Err(PyTypeError::new_err(format!(
            "{name} is a {}, possible is a number",
            given.get_type().name()?
        ))),
    }
}
