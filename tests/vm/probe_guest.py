import subprocess
def go(provider, script):
    import sys
    here = sys.modules["__main__"].lab()
    here.fresh("probe", provider)
    t = here.serve()
    c = here.connect(t)
    d = c.disk()
    out = subprocess.run(["bash", "-x", script, d], capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace").stdout
    here.clear()
    return out
