//! The parameters of modules as bytes, and how layouts cut those of a decoder.
//!
//! The crate `verl-reshard`, whose types these functions use, plans changes of layout and carries them out on bytes.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use verl_decoder::decoder::Decoder;
use verl_decoder::parameters::named_parameters;

use crate::weights::{Loader, Weights};

pub use verl_reshard::*;

/// Name, element type and shape of each parameter, in the order of the module; a parameter used twice is listed once.
///
/// # Errors
/// [`SyncError::Element`] if a parameter has a type that cannot be sent.
pub fn tensor_specs<M: Module>(module: &M) -> Result<Vec<TensorSpec>, SyncError> {
    let shapes: HashMap<String, Vec<usize>> = named_parameters(module).into_iter().collect();
    let weights = Weights::of(module).named.into_iter();
    let spec = |(name, tensor): (String, Tensor<1>)| {
        let dtype = tensor.dtype();
        let element = element(dtype).ok_or_else(|| SyncError::Element {
            tensor: name.clone(),
            element: format!("{dtype:?}"),
        })?;
        let flat = || vec![tensor.dims()[0]];
        let shape = shapes.get(&name).cloned().unwrap_or_else(flat);
        Ok(TensorSpec {
            name,
            element,
            shape,
        })
    };
    weights.map(spec).collect()
}

/// The bytes of each parameter, in the order of [`tensor_specs`].
pub fn parameter_bytes<M: Module>(module: &M) -> Vec<Vec<u8>> {
    let weights = Weights::of(module).named.into_iter();
    weights
        .map(|(_, tensor)| tensor.into_data().as_bytes().to_vec())
        .collect()
}

/// The module with other parameters of the same types and shapes.
///
/// # Panics
/// Panics if the bytes are not those of the module's parameters, in the order of [`tensor_specs`].
#[must_use]
pub fn with_parameter_bytes<M: Module>(module: M, bytes: &[Vec<u8>]) -> M {
    let device = module.devices().into_iter().next();
    let device = device.unwrap_or_else(Device::flex);
    let own = Weights::of(&module).by_id;
    assert_eq!(own.len(), bytes.len(), "bytes of each parameter");
    let weights = own.iter().zip(bytes);
    let weights = weights
        .map(|((id, old), bytes)| (*id, flat(bytes, old.dtype(), &device)))
        .collect();
    drop(own);
    module.map(&mut Loader { weights })
}

/// A flat tensor of these bytes.
pub(crate) fn flat(bytes: &[u8], dtype: DType, device: &Device) -> Tensor<1> {
    let cells = bytes.len() / dtype.size();
    let data = TensorData::from_bytes_vec(bytes.to_vec(), [cells], dtype);
    Tensor::from_data(data, (device, dtype))
}

/// The element type in which a burn tensor travels; `None` if it cannot.
fn element(dtype: DType) -> Option<Element> {
    match dtype {
        DType::F64 => Some(Element::F64),
        DType::F32 => Some(Element::F32),
        DType::F16 => Some(Element::F16),
        DType::BF16 => Some(Element::Bf16),
        _ => None,
    }
}

/// The parameters of a decoder with their stages and cuts, in the order of [`tensor_specs`].
///
/// Query, key and value projections are cut by heads, gate and up projections, embedding and output head by rows; output and
/// down projections are cut along the axis that they sum over. Norms and the biases of sums are not cut.
///
/// # Errors
/// As [`tensor_specs`].
pub fn decoder_weights(decoder: &Decoder) -> Result<Vec<Weight>, SyncError> {
    let config = &decoder.config;
    let head = config.heads.dim;
    let specs = tensor_specs(decoder)?.into_iter();
    let weight = |spec: TensorSpec| {
        let mut path = spec.name.trim_start_matches("model.").split('.');
        let first = path.next().unwrap_or_default();
        let layer = path.next().and_then(|layer| layer.parse().ok());
        let depth = match (first, layer) {
            ("layers", Some(layer)) => Depth::Layer(layer),
            ("embed_tokens", _) if config.tied_head => Depth::Ends,
            ("embed_tokens", _) => Depth::First,
            _ => Depth::Last,
        };
        let mut path = spec.name.rsplit('.');
        let (kind, operation) = (path.next(), path.next().unwrap_or_default());
        let cut = |axis, unit| Some(Split { axis, unit });
        let split = match operation {
            "q_proj" | "k_proj" | "v_proj" => cut(0, head),
            "gate_proj" | "up_proj" | "embed_tokens" | "lm_head" => cut(0, 1),
            "o_proj" if kind == Some("weight") => cut(1, head),
            "down_proj" if kind == Some("weight") => cut(1, 1),
            _ => None,
        };
        Weight { spec, depth, split }
    };
    Ok(specs.map(weight).collect())
}
