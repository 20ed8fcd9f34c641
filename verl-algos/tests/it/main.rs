//! Exact maths: golden numbers, properties, and required documentation.

mod documented;
mod golden;
mod properties;
