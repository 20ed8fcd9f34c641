//! The stages and algorithms of verl, and the data sets they read.
//!
//! | stage | reads | writes |
//! |---|---|---|
//! | [`prompts`] | rows of a data set | prompt tokens, answers |
//! | [`generate`] | prompts | responses with log-probs |
//! | [`reward`] | responses, answers | rewards |
//! | [`log_probs`] | prompts, responses | log-probs of policy or reference |
//! | [`advantages`] | rewards | advantages |
//! | [`update`] | all of it | nothing: it moves the weights |
//! | [`evaluate`] | held-out rows | metrics and samples, between steps |

pub mod advantages;
pub mod algorithms;
pub mod data;
pub mod evaluate;
pub mod generate;
pub mod log_probs;
pub mod model;
pub mod prompts;
pub mod reward;
pub mod update;
