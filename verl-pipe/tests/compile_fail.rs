//! Mistakes that the compiler must refuse, each with what it says.

#[test]
fn mistakes_that_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
