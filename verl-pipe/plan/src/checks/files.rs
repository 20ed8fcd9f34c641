//! Model folders and data files exist and can be used; a configuration's errors and warnings about them are reported in
//! its own words.

use verl_words::diagnostic::Diagnostic;

use super::settings::{setting_error, setting_warning};
use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for (model, info) in draft.pipe.models.iter().zip(draft.models) {
        let place = format!("[models.{}] ({})", model.name, model.kind);
        let errors = info.as_ref().err().into_iter().flatten();
        findings.extend(errors.map(|error| setting_error(&place, error)));
        let warnings = info.as_ref().into_iter().flat_map(|info| &info.warnings);
        findings.extend(warnings.map(|warning| setting_warning(&place, warning)));
    }
    for data in &draft.pipe.data {
        let place = format!("[data.{}] ({})", data.name, data.kind);
        let errors = (data.check)(draft.context).err().into_iter().flatten();
        findings.extend(errors.map(|error| setting_error(&place, &error)));
    }
}
