from mtuner_jax.inspection import hlo_programs


def test_cudnn_workspace_is_larger_with_grouped_queries():
    call = (
        "  %bwd = (bf16[2,8,64,16]{3,1,2,0}, bf16[2,{kv},64,16]{3,1,2,0}, u8[0]{0}) "
        'custom-call(%q), custom_call_target="__cudnn$fmhaSoftmaxBackward"'
    )
    elements = 2 * 8 * 64 * 16
    equal, grouped = call.replace("{kv}", "8"), call.replace("{kv}", "2")
    assert hlo_programs.cudnn_workspace_bytes(equal) == 4 * elements
    assert hlo_programs.cudnn_workspace_bytes(grouped) == 8 * elements
