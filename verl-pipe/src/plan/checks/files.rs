//! Model folders and data files are there and can be used; what a configuration refuses or doubts of them is told in its
//! words.

use super::settings::{doubted, refused};
use crate::diagnostic::Diagnostic;
use crate::plan::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for (model, info) in draft.pipe.models.iter().zip(draft.models) {
        let place = format!("[models.{}] ({})", model.name, model.kind);
        let errors = info.as_ref().err().into_iter().flatten();
        findings.extend(errors.map(|error| refused(&place, error)));
        let doubts = info.as_ref().into_iter().flat_map(|info| &info.doubts);
        findings.extend(doubts.map(|doubt| doubted(&place, doubt)));
    }
    for data in &draft.pipe.data {
        let place = format!("[data.{}] ({})", data.name, data.kind);
        let errors = (data.check)(draft.context).err().into_iter().flatten();
        findings.extend(errors.map(|error| refused(&place, &error)));
    }
}
