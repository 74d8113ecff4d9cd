from tests.e2e.test_hunyuan_image_3 import *
import tests.e2e.test_hunyuan_image_3 as T
@pytest.mark.parametrize("epd",["E:1,PD:1","EP:1,D:1"])
async def test_x(tmp_path, epd):
    path=build(tmp_path/'a'); reference=Reference(path)
    with torch.no_grad():
        expected = {case.name: expected_of(reference, case) for case in CASES}
    with engine_threads():
        engine = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "max_num_batched_tokens":64}
        omni=AsyncOmni(path, stage_overrides=[f"language_model.{n}={v}" for n,v in engine.items()], epd=epd)
        s=Served("x",omni,reference,expected)
        for case in CASES:
            try:
                s.check(case, await ask(s,case)); print("OK",case.name)
            except BaseException as e: print("BAD",case.name,repr(e)[:300])
        omni.shutdown()
