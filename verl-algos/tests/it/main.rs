//! Exact maths: golden numbers, properties, and what the documentation has to say.

mod documented;
mod golden;
mod properties;
