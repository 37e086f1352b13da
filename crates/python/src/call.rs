//! Calls: arrays in, arrays written.

use flashcore::{Append, Backward, Descales, Name, Place, Problem, Rotary, Starts, plan};
use flashcore_driver::Driver;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    arrays::{Array, Order},
    devices, errors,
    lengths::{Lengths, Places},
    options::{self, Options},
};

/// Runs a call on arrays that were read.
pub fn execute(
    py: Python<'_>,
    [q, k, v]: [&Array<'_>; 3],
    o: &Array<'_>,
    lse: Option<&Array<'_>>,
    key_lengths: Option<&Lengths<'_>>,
    descales: [Option<&Array<'_>>; 3],
    places: Option<&Places<'_>>,
    checked: bool,
    options: Options,
) -> PyResult<()> {
    let order = options.order;
    let stream = q.stream(py)?;
    let tensors =
        [q.tensor(py, Name::Q, order)?, k.tensor(py, Name::K, order)?, v.tensor(py, Name::V, order)?];
    let mut o = o.tensor_mut(py, Name::O, order)?;
    let mut lse = lse.map(|lse| lse.lse_mut(py)).transpose()?;
    let mut each = [None; 3];
    for ((to, descale), name) in each.iter_mut().zip(descales).zip(Name::DESCALES) {
        *to = descale.map(|descale| descale.descale(py, name)).transpose()?;
    }
    let descales = Descales::some_of(each.each_ref().map(Option::as_ref));
    let descales = options.descale_keys.map_or(descales, |keys| descales.per_block(keys));
    let mut attention = options.attention().descales(descales);
    if let Some(places) = places {
        attention = places.apply(py, &attention)?;
    }
    if let Some(lengths) = key_lengths {
        let most = places.and_then(Places::most_keys).unwrap_or(tensors[1].shape()[2]);
        attention = lengths.apply(py, &attention, most)?;
    }
    if checked {
        attention = attention.checked();
    }
    let run = || {
        let [q, k, v] = &tensors;
        let placed = devices::of(q.place(), stream)?;
        placed.run(q.place(), || attention.run_into(&placed.device, q, k, v, &mut o, lse.as_mut()))
    };
    py.detach(run).map_err(|error| errors::raise(py, &error))
}

/// Computes attention on any arrays into given outputs. With `descales`, those of q, k and v or None each, bytes are the codes
/// of 8-bit floats, and with `block` those of k and v are for each so many keys; with `quantise`, as problems have it in their
/// texts, tensors become such within the call. `places` says where sequences are that are packed or in pages: see `Places`; with
/// `checked`, what it says and key lengths are looked at first, also in a GPU's memory.
#[pyfunction]
#[pyo3(signature = (q, k, v, o, lse, key_lengths, mask, left, right, scale, softcap, layout, descales=None, quantise=None, block=None, places=None, checked=false))]
#[allow(clippy::needless_pass_by_value)] // Tuples come as values.
pub fn run(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    key_lengths: Option<&Bound<'_, PyAny>>,
    mask: &str,
    left: Option<usize>,
    right: Option<usize>,
    #[pyo3(from_py_with = options::scale)] scale: Option<f64>,
    #[pyo3(from_py_with = options::softcap)] softcap: f64,
    layout: &str,
    descales: Option<[Option<Bound<'_, PyAny>>; 3]>,
    quantise: Option<&str>,
    block: Option<usize>,
    places: Option<&Bound<'_, PyAny>>,
    checked: bool,
) -> PyResult<()> {
    let py = q.py();
    let options = Options::new(py, mask, left, right, scale, softcap, layout)?.quantised(py, quantise)?;
    let options = options.with_descale_keys(block);
    let lengths = key_lengths.map(Lengths::read).transpose()?;
    let mut inputs = [Array::read(q, Name::Q)?, Array::read(k, Name::K)?, Array::read(v, Name::V)?];
    let mut given = [const { None }; 3];
    if let Some(descales) = &descales {
        inputs = inputs.map(Array::with_float8);
        for ((to, descale), name) in given.iter_mut().zip(descales).zip(Name::DESCALES) {
            *to = descale.as_ref().map(|descale| Array::read(descale, name)).transpose()?;
        }
    }
    // An error in an input is reported before the missing output that follows from it.
    for (input, name) in inputs.iter().zip([Name::Q, Name::K, Name::V]) {
        input.tensor(py, name, options.order)?;
    }
    let o = Array::read(o, Name::O)?;
    let lse = lse.map(|lse| Array::read(lse, Name::Lse)).transpose()?;
    let descales = given.each_ref().map(Option::as_ref);
    let places = places.map(Places::read).transpose()?;
    let inputs = inputs.each_ref();
    execute(py, inputs, &o, lse.as_ref(), lengths.as_ref(), descales, places.as_ref(), checked, options)
}

/// Appends new keys and values, (batch, heads, new, head_dim) or packed with their starts, to a cache, which is written in
/// place, and computes attention to it into given outputs. `key_lengths` are those before. `rotary` are tables of cosines and
/// sines, (1, 1, positions, half of what is turned), whether neighbours are pairs, and each sequence's first position or None.
/// With `descales`, those of keys and values or None each, the caches' bytes are the codes of 8-bit floats. The rest is as for
/// `run`.
#[pyfunction]
#[pyo3(signature = (q, caches, new, new_starts, rotary, o, lse, key_lengths, mask, left, right, scale, softcap, places, checked, descales=None))]
#[allow(clippy::needless_pass_by_value, clippy::type_complexity)] // Tuples come as values, and are taken apart here.
pub fn append<'py>(
    q: &Bound<'py, PyAny>,
    caches: [Bound<'py, PyAny>; 2],
    new: [Bound<'py, PyAny>; 2],
    new_starts: Option<(Bound<'py, PyAny>, usize)>,
    rotary: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>, bool, Option<Bound<'py, PyAny>>)>,
    o: &Bound<'py, PyAny>,
    lse: &Bound<'py, PyAny>,
    key_lengths: &Bound<'py, PyAny>,
    mask: &str,
    left: Option<usize>,
    right: Option<usize>,
    #[pyo3(from_py_with = options::scale)] scale: Option<f64>,
    #[pyo3(from_py_with = options::softcap)] softcap: f64,
    places: &Bound<'py, PyAny>,
    checked: bool,
    descales: Option<[Option<Bound<'py, PyAny>>; 2]>,
) -> PyResult<()> {
    let py = q.py();
    let options = Options::new(py, mask, left, right, scale, softcap, "bhsd")?;
    let (lengths, places) = (Lengths::read(key_lengths)?, Places::read(places)?);
    let read = |array: &Bound<'py, PyAny>, name| Array::read(array, name);
    let (q, o, lse) = (read(q, Name::Q)?, read(o, Name::O)?, read(lse, Name::Lse)?);
    let [mut k, mut v] = [read(&caches[0], Name::K)?, read(&caches[1], Name::V)?];
    let mut codes = [None, None];
    if let Some(descales) = &descales {
        [k, v] = [k, v].map(Array::with_float8);
        for ((to, of), name) in codes.iter_mut().zip(descales).zip([Name::KDescale, Name::VDescale]) {
            *to = of.as_ref().map(|of| read(of, name)).transpose()?;
        }
    }
    let [new_k, new_v] = [read(&new[0], Name::NewK)?, read(&new[1], Name::NewV)?];
    let starts = new_starts
        .map(|(starts, most)| Ok::<_, PyErr>((read(&starts, Name::NewStarts)?, most)))
        .transpose()?;
    let order = Order::HeadsFirst;
    let stream = q.stream(py)?;
    let q = q.tensor(py, Name::Q, order)?;
    let (mut k, mut v) = (k.tensor_mut(py, Name::K, order)?, v.tensor_mut(py, Name::V, order)?);
    let (mut o, mut lse) = (o.tensor_mut(py, Name::O, order)?, lse.lse_mut(py)?);
    let (new_k, new_v) = (new_k.tensor(py, Name::NewK, order)?, new_v.tensor(py, Name::NewV, order)?);
    let mut new = Append::new(&new_k, &new_v);
    if let Some((starts, most)) = &starts {
        new = new.packed(Starts::of(&starts.indices(py, Name::NewStarts)?, *most));
    }
    let angles = rotary
        .map(|(cos, sin, interleaved, positions)| {
            let positions = positions.map(|positions| read(&positions, Name::Positions)).transpose()?;
            Ok::<_, PyErr>((read(&cos, Name::Cos)?, read(&sin, Name::Sin)?, interleaved, positions))
        })
        .transpose()?;
    if let Some((cos, sin, interleaved, positions)) = &angles {
        let mut rotary = Rotary::new(&cos.tensor(py, Name::Cos, order)?, &sin.tensor(py, Name::Sin, order)?);
        rotary = if *interleaved { rotary.interleaved() } else { rotary };
        if let Some(positions) = positions {
            rotary = rotary.positions(&positions.indices(py, Name::Positions)?);
        }
        new = new.rotary(rotary);
    }
    let [of_k, of_v] = &codes;
    let of_k = of_k.as_ref().map(|of| of.descale(py, Name::KDescale)).transpose()?;
    let of_v = of_v.as_ref().map(|of| of.descale(py, Name::VDescale)).transpose()?;
    let descales = Descales::some_of([None, of_k.as_ref(), of_v.as_ref()]);
    let attention = places.apply(py, &options.attention().descales(descales))?;
    let most = places.most_keys().unwrap_or(k.as_tensor().shape()[2]);
    let attention = lengths.apply(py, &attention, most)?;
    let attention = if checked { attention.checked() } else { attention };
    let run = || {
        let placed = devices::of(q.place(), stream)?;
        placed.run(q.place(), || {
            attention.append_into(&placed.device, &new, &q, &mut k, &mut v, &mut o, Some(&mut lse))
        })
    };
    py.detach(run).map_err(|error| errors::raise(py, &error))
}

/// Computes the gradients of q, k and v, as (batch, heads, length, head_dim), into given outputs. `saved` are q, k, v, o and
/// lse.
#[pyfunction]
#[pyo3(signature = (saved, grad_o, grad_lse, outputs, key_lengths, mask, left, right, scale, softcap, places=None))]
#[allow(clippy::needless_pass_by_value)] // Tuples come as values.
pub fn run_backward<'py>(
    saved: [Bound<'py, PyAny>; 5],
    grad_o: &Bound<'py, PyAny>,
    grad_lse: Option<&Bound<'py, PyAny>>,
    outputs: [Bound<'py, PyAny>; 3],
    key_lengths: Option<&Bound<'py, PyAny>>,
    mask: &str,
    left: Option<usize>,
    right: Option<usize>,
    #[pyo3(from_py_with = options::scale)] scale: Option<f64>,
    #[pyo3(from_py_with = options::softcap)] softcap: f64,
    places: Option<&Bound<'py, PyAny>>,
) -> PyResult<()> {
    let py = grad_o.py();
    let options = Options::new(py, mask, left, right, scale, softcap, "bhsd")?;
    let lengths = key_lengths.map(Lengths::read).transpose()?;
    let [q, k, v, o, lse] = &saved;
    let read = [(q, Name::Q), (k, Name::K), (v, Name::V), (o, Name::O), (grad_o, Name::Do)];
    let arrays =
        read.iter().map(|(array, name)| Array::read(array, *name)).collect::<PyResult<Vec<Array<'_>>>>()?;
    let tensors = arrays.iter().zip(read).map(|(array, (_, name))| array.tensor(py, name, Order::HeadsFirst));
    let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
    let stream = arrays[0].stream(py)?;
    let lse = Array::read(lse, Name::Lse)?;
    let grad_lse = grad_lse.map(|grad| Array::read(grad, Name::Dlse)).transpose()?;
    let written = [Name::Dq, Name::Dk, Name::Dv];
    let arrays = outputs.iter().zip(written).map(|(array, name)| Array::read(array, name));
    let arrays = arrays.collect::<PyResult<Vec<Array<'_>>>>()?;
    let outputs =
        arrays.iter().zip(written).map(|(array, name)| array.tensor_mut(py, name, Order::HeadsFirst));
    let mut outputs = outputs.collect::<PyResult<Vec<_>>>()?;
    let (lse, grad_lse) =
        (lse.lse(py, Name::Lse)?, grad_lse.as_ref().map(|grad| grad.lse(py, Name::Dlse)).transpose()?);
    let mut given = Backward::new([&tensors[0], &tensors[1], &tensors[2]], &tensors[3], &lse, &tensors[4]);
    if let Some(grad_lse) = &grad_lse {
        given = given.with_dlse(grad_lse);
    }
    let places = places.map(Places::read).transpose()?;
    let mut attention = options.attention();
    if let Some(places) = &places {
        attention = places.apply(py, &attention)?;
    }
    if let Some(lengths) = &lengths {
        let most = places.as_ref().and_then(Places::most_keys).unwrap_or(tensors[1].shape()[2]);
        attention = lengths.apply(py, &attention, most)?;
    }
    let run = || {
        let [dq, dk, dv] = &mut outputs[..] else { unreachable!("there are three") };
        let placed = devices::of(tensors[0].place(), stream)?;
        placed.run(tensors[0].place(), || attention.backward_into(&placed.device, &given, dq, dk, dv))
    };
    py.detach(run).map_err(|error| errors::raise(py, &error))
}

/// The problem that arrays and options pose, and where its tensors lie.
fn problem(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    key_lengths: Option<&Bound<'_, PyAny>>,
    options: Options,
) -> PyResult<(Problem, Place)> {
    let py = q.py();
    let lengths = key_lengths.map(Lengths::read).transpose()?;
    let arrays = [Array::read(q, Name::Q)?, Array::read(k, Name::K)?, Array::read(v, Name::V)?];
    let [q, k, v] = &arrays;
    let q = q.tensor(py, Name::Q, options.order)?;
    let (k, v) = (k.tensor(py, Name::K, options.order)?, v.tensor(py, Name::V, options.order)?);
    let mut attention = options.attention();
    if let Some(lengths) = &lengths {
        attention = lengths.apply(py, &attention, k.shape()[2])?;
    }
    let problem = attention.problem(&q, &k, &v).map_err(|error| errors::raise(py, &error))?;
    for (tensor, given) in [(Name::K, k.place()), (Name::V, v.place())] {
        if given != q.place() {
            let device = q.place().to_string();
            return Err(errors::raise(py, &flashcore::Error::PlaceMismatch { tensor, given, device }));
        }
    }
    Ok((problem, q.place()))
}

/// The device that would run a call, or the exception that the call would raise.
#[pyfunction]
#[pyo3(signature = (q, k, v, key_lengths, mask, left, right, scale, softcap, layout, quantise=None))]
pub fn check(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    key_lengths: Option<&Bound<'_, PyAny>>,
    mask: &str,
    left: Option<usize>,
    right: Option<usize>,
    #[pyo3(from_py_with = options::scale)] scale: Option<f64>,
    #[pyo3(from_py_with = options::softcap)] softcap: f64,
    layout: &str,
    quantise: Option<&str>,
) -> PyResult<String> {
    let py = q.py();
    let options = Options::new(py, mask, left, right, scale, softcap, layout)?.quantised(py, quantise)?;
    let (problem, place) = problem(q, k, v, key_lengths, options)?;
    let device = py.detach(|| match place {
        Place::Host => Ok(devices::cpu().clone()),
        Place::Cuda(ordinal) => devices::gpu(ordinal).map(flashcore::Device::cuda_with),
    });
    let device = device.map_err(|error| errors::raise(py, &error))?;
    device.supports(&problem).map_err(|error| errors::raise(py, &error))?;
    Ok(device.to_string())
}

/// The plan of a call as text: on the device where the tensors lie, or on a typical GPU of a target.
#[pyfunction]
#[pyo3(signature = (q, k, v, key_lengths, mask, left, right, scale, softcap, layout, target, quantise=None))]
pub fn explain(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    key_lengths: Option<&Bound<'_, PyAny>>,
    mask: &str,
    left: Option<usize>,
    right: Option<usize>,
    #[pyo3(from_py_with = options::scale)] scale: Option<f64>,
    #[pyo3(from_py_with = options::softcap)] softcap: f64,
    layout: &str,
    target: Option<&str>,
    quantise: Option<&str>,
) -> PyResult<String> {
    let py = q.py();
    let options = Options::new(py, mask, left, right, scale, softcap, layout)?.quantised(py, quantise)?;
    let (problem, place) = problem(q, k, v, key_lengths, options)?;
    let plan = match (target, place) {
        (Some(name), _) => {
            let Some(target) = plan::Target::from_name(name) else {
                let names = plan::Target::ALL.map(plan::Target::name).join(", ");
                return Err(errors::contract(py, &format!("target is '{name}', possible are {names}")));
            };
            plan::Plan::choose(&problem, &plan::Hardware::typical(target))
        }
        (None, Place::Cuda(ordinal)) => {
            py.detach(|| devices::gpu(ordinal)).and_then(|cuda| cuda.plan(&problem))
        }
        (None, Place::Host) => {
            let engine = flashcore::cpu::Engine::new();
            let schedule = engine.schedule(problem.head_dim, problem.head_dim_v);
            let why = engine.why();
            return Ok(format!(
                "problem   {problem}\nengine    cpu ({engine})\nwhy       {why}\nschedule  {schedule}"
            ));
        }
    };
    plan.map(|plan| plan.to_string()).map_err(|error| errors::raise(py, &error))
}

/// What this machine has, as `flashcore_attn.info` shows it. This loads the CUDA driver.
#[pyfunction]
pub fn machine(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    let engine = flashcore::cpu::Engine::new();
    let cpu = PyDict::new(py);
    cpu.set_item("instructions", engine.isa().to_string())?;
    cpu.set_item("why", engine.why())?;
    cpu.set_item("threads", engine.schedule(64, 64).threads)?;
    info.set_item("cpu", cpu)?;
    let cuda = PyDict::new(py);
    let found = py.detach(|| -> Result<_, String> {
        let driver = Driver::load().map_err(|error| error.to_string())?;
        let count = driver.device_count().map_err(|error| error.to_string())?;
        let gpus: Vec<_> = (0..count as u32)
            .map(|ordinal| {
                devices::gpu(ordinal).map_or_else(|error| error.to_string(), |cuda| cuda.to_string())
            })
            .collect();
        Ok((driver.version().to_string(), gpus))
    });
    match found {
        Ok((driver, gpus)) => {
            cuda.set_item("driver", driver)?;
            cuda.set_item("devices", gpus)?;
        }
        Err(reason) => {
            cuda.set_item("devices", Vec::<String>::new())?;
            cuda.set_item("reason", reason)?;
        }
    }
    let cache = flashcore::cuda::CubinCache::of_user();
    cuda.set_item("kernel_cache", cache.folder().map(|folder| folder.display().to_string()))?;
    info.set_item("cuda", cuda)?;
    Ok(info)
}
