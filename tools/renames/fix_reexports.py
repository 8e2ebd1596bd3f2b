import re,subprocess,json
from pathlib import Path
out=json.loads(subprocess.run(['.venv/bin/ruff','check','--select','F401','--output-format','json','windlass'],capture_output=True,text=True).stdout)
ren={}
for e in out:
    p=Path(e['filename']); lines=p.read_text().split('\n'); r=e['location']['row']-1
    m=re.search(r'\b(\w+) as (\w+)',lines[r])
    if m and m.group(1)!=m.group(2):
        lines[r]=lines[r].replace(m.group(0),f"{m.group(1)} as {m.group(1)}"); ren.setdefault(str(p),{})[m.group(2)]=m.group(1)
        p.write_text('\n'.join(lines))
    else: print('?',p,lines[r])
for p,d in ren.items():
    s=Path(p).read_text(); i=s.find('__all__')
    if i>=0:
        for a,b in d.items(): s=s[:i]+re.sub(r'"%s"'%a,'"%s"'%b,s[i:])
    Path(p).write_text(s)
print(len(ren))
